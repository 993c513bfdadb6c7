from setuptools import setup

setup(name="styles")
