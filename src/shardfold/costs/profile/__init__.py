"""What a machine was measured to take: kernels by family and shape, the host, collectives."""
