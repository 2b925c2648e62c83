"""Who starts what: ranks as processes on this host.

`local` starts them and ends them, `output` keeps their lines apart, `outcome` says which one was
to blame.
"""
