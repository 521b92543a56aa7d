"""`python -m shardwise`, and so `torchrun -m shardwise train ...`."""

from shardwise.cli import main

main()
