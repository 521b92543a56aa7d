"""The three sets of keys that a configuration may be written in: native, DeepSpeed's and Accelerate's."""
