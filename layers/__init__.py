"""Pure Equinox layers whose activations carry typed names. They know names, never policies."""

from layers.attend import Attend as Attend, local_attend as local_attend
from layers.attention import Attention as Attention
from layers.block import DenseBlock as DenseBlock, MoEBlock as MoEBlock
from layers.buffer import Buffer as Buffer, split_buffers as split_buffers
from layers.dispatch import CapacityDispatch as CapacityDispatch, Dispatch as Dispatch, LocalDispatch as LocalDispatch
from layers.embed import Embedding as Embedding
from layers.experts import Experts as Experts
from layers.linear import Linear as Linear
from layers.mla import MLA as MLA
from layers.mlp import SwiGLU as SwiGLU
from layers.moe import MoE as MoE, MoEStats as MoEStats
from layers.mtp import MTP as MTP
from layers.norm import RMSNorm as RMSNorm
from layers.rope import Rope as Rope, Rotation as Rotation
from layers.router import Router as Router
from layers.stack import Stack as Stack, build_stack as build_stack
from layers.tag import Tag as Tag, name_tags as name_tags, tag as tag, tags as tags
