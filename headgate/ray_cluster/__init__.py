"""Inference services on the nodes of a Ray cluster: one supervised service per node, and the membership for gateways.

Only functions of this package import ray, when they run. Importing its modules does not import ray.
"""
