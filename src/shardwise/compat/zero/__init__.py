"""`deepspeed.zero`: models built in shards, and the parameters of stage 3 as DeepSpeed shows them."""
