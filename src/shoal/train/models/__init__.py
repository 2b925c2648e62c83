"""The zoo: nets that people learn distributed training with.

`catalog` lists them (without torch), `zoo` holds them, `build` makes one, the user's own included.
"""
