"""Parts of `eagle3 inspect`: reading leniently, weights, engines, RoPE, the patch and the page."""
