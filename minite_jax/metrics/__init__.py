"""What a run and a benchmark write down: metrics, provenance, result tables and the plots made from them."""
