"""A node of several GPUs, whole or by one of its ranks: latency, throughput, communication."""
