from shardwise.compat.launcher import DEEPSPEED_ENVIRONMENT_NAME, main

if __name__ == "__main__":
    main()
