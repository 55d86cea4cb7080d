"""Curvature: blocks, layer adapters, capture and statistics."""
