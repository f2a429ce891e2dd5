"""Engines that hotset's experts run inside of. Each knows its engine; none knows `models/`."""
