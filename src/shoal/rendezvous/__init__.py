"""How ranks meet.

`ways` reads where to meet (an address, a shared file, the environment of torchrun or Slurm),
`store` opens the place, `roll` calls the roll there and compares what everyone brought.
Only `ways` is free of torch, for launchers.
"""
