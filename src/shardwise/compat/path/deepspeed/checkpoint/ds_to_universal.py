from shardwise.compat.universal import main, parse_arguments

if __name__ == "__main__":
    main(parse_arguments())
