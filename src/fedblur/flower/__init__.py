"""A real federation over Flower: the transport is Flower's, the privacy is ours (docs/deploy.md).

from fedblur.flower.client import client_app      # client_app(deployment): the app of the nodes
from fedblur.flower.server import server_app      # server_app(deployment): the app of the server
from fedblur.flower.settings import Deployment    # what they have in common
"""
