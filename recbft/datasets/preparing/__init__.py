"""From events to histories: filters, order, minimum counts."""
