"""Where each parameter lies in a flat buffer, and which slice of it a rank owns: arithmetic."""
