"""WebShop (Yao et al., arXiv 2207.01206): its products, goals, search, text pages, and reward."""
