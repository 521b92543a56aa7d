"""`shardwise train`: a language model from your own text, from raw bytes to exported weights.

    options   the options of the command line, in sections
    command   checks them and starts local ranks, or runs as one of torchrun's
    worker    one rank: process group, signals, failure report
    job       the options resolved for a number of ranks
    run       builds the engine, resumes and trains
    loop      the training loop over an engine or a pipeline; measures the memory of its last steps
    finish    writes sample, report, export and plot

`corpus` and `data` decide which sample comes when, with integers only.
"""
