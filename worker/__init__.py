"""One process per device: it turns step plans into device work."""
