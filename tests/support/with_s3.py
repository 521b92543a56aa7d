"""Run Python with an S3 server of its own: python tests/support/with_s3.py -m pytest tests/test_object_store.py

The server is moto's, in this process. `SHARDWISE_OBJECT_STORE` is the address of an empty bucket in it.
"""

import os
import subprocess
import sys

BUCKET = "shardwise"


def main() -> int:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "SHARDWISE_OBJECT_STORE": f"s3://{BUCKET}",
    }
    os.environ.update(settings)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    code = subprocess.run([sys.executable, *sys.argv[1:]], check=False).returncode
    server.stop()
    return code


if __name__ == "__main__":
    sys.exit(main())
