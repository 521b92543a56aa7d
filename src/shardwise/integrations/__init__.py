"""Other libraries' own extension points: Lightning's strategies, transformers' Trainer, Ray's workers.

    lightning      `Trainer(strategy=ShardwiseStrategy("zero3"))`
    transformers   `ShardwiseTrainer`, a Trainer that trains through an engine
    ray            `resume(engine)` and `report(engine, metrics)` in the loop of a TorchTrainer
    settings       what a trainer says about precision and accumulation, in a configuration
    detach         taking an engine off a model that keeps its values

The library that a module is for is imported by that module alone, so this package imports none of them.
"""
