"""Where a boss listens, as users write it."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import SettingsError


@dataclass(frozen=True)
class Address:
    """Where a boss listens, or is."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address:
        """`tcp://HOST:PORT` or `HOST:PORT`."""
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or not 0 <= int(port) < 65536:
            raise SettingsError(
                [
                    f"{text!r} is no address of a boss: tcp://HOST:PORT is, for example "
                    "tcp://192.168.0.1:1024."
                ]
            )
        return cls(host, int(port))

    @property
    def endpoint(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"
