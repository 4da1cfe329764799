"""The weights that learn: model, packing, optimizer, ranks."""
