"""The target model, known from its checkpoint alone.

checkpoint   `Target`: architecture, default layers, fingerprint
"""
