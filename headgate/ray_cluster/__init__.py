"""Inference services on the nodes of a Ray cluster: one supervised process per node, and the list of them for gateways.

Functions of this package import ray when they run; modules do not, and the rest of the product does not import ray.
"""
