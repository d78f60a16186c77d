"""Inputs of the figures for pruning: labelled pictures of a generator, and a ResNet-18 that is trained on them."""
