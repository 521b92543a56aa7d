"""The two foreign sets of keys that a configuration may be written in: DeepSpeed's and Accelerate's."""
