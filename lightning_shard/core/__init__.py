"""What every room knows: options and their checks, the mesh, layouts, and classes of tensors."""
