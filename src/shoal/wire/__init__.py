"""How messages move between two ranks: any tree of tensors, no shape agreed beforehand.

`tree` takes a message apart and puts it together, `header` is what goes before its buffers and
what is believed of it. Both are pure; links that carry them are being built on top.
"""
