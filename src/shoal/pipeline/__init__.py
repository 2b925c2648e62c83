"""Model parallel: one model cut into stages, each on a rank of its own.

`layers` and `graph` read a model, `partition` says where to cut it, `schedule` in what order stages
work on micro-batches, `stage` computes, `runner` moves values along the routes between stages.
"""
