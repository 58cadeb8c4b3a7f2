"""Names a model's largest layers, for error messages."""

from torch import nn


def largest_layers(model: nn.Module, num_layers: int = 3) -> str:
    """Name the layers with the most parameters of their own, the largest first.

    Args:
        model: The module whose layers are named, of any kind.
        num_layers: How many at the most.

    Returns:
        A sentence, such as "Its largest layers are 'net.0' (Conv2d, 224 parameters)."
    """
    sizes = {
        name: sum(param.numel() for param in module.parameters(recurse=False))
        for name, module in model.named_modules()
    }
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    if not largest:
        return "It has no layer with parameters."
    named = [
        f"{name!r} ({type(model.get_submodule(name)).__name__}, {sizes[name]:,} parameters)"
        for name in largest[:num_layers]
    ]
    return f"Its largest layers are {', '.join(named)}."
