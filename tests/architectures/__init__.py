"""Every architecture that TransformerLens lists, against the raw Hugging Face weights."""
