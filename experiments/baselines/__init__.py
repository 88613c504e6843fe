"""Deliberately different engines, to compare with. The only place where a layer is written a second time."""
