"""Peer-to-peer DiLoCo training of language models on a hivemind DHT."""
