"""Writers of traces for other engines: files to copy beside them. They import nothing from minite_jax."""
