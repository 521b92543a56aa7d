"""Several NCCL ranks on one GPU."""


def nccl_environment(rank: int) -> dict[str, str]:
    """Each rank claims a host of its own, so that NCCL accepts several on one GPU and connects them by sockets."""
    off = dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"), "0")
    on = dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1")
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", **off, **on}
