def write_page(r): return ""
