"""Mixture of experts: a router, experts, and the dispatchers that bring tokens to them.

Read ``layer.py`` first. Shazeer et al. 2017 (arXiv:1701.06538), Fedus et al. 2021
(arXiv:2101.03961); names are Megatron-Core's.
"""
