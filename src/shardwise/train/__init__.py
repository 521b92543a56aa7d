"""`shardwise train`: a language model from your own text, from the first byte to exported weights.

    arguments   the command line: options by name                    -> options.Options
    command     checks what was asked, then starts local ranks       -> crew, or runs as one of torchrun's
    worker      one rank: process group, signals, errors told once
    run         what a run is made of: corpus, order, model, engine
    loop        train, evaluate, save; stop when asked; finish

Everything that decides which sample comes when is in `corpus` and `order`, and is integers only.
"""
