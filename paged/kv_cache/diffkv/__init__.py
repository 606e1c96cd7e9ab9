"""DiffKV's pages and their manager. (The policy that uses them is not there yet.)"""
