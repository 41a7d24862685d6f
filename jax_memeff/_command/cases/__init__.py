"""A call by its sizes and features: its options, arrays, programs and definition."""
