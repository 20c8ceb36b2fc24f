"""Baselines such as FSDP and Megatron-LM, pins, and the roles of dims that both rely on."""
