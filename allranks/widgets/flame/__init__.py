"""Where ranks spend their time, as a flame graph of all of them."""
