# %%
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# %%
jax.distributed.initialize()
print(f"process {jax.process_index()} of {jax.process_count()}")
print("devices:", jax.device_count(), "local:", jax.local_device_count())

# %%
mesh = Mesh(np.array(jax.devices()), ("data",))
sharding = NamedSharding(mesh, P("data"))
local = np.full((2, 4), jax.process_index(), np.float32)
batch = jax.make_array_from_process_local_data(sharding, local)
print("global shape:", batch.shape)

# %%
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(batch)
print("sum over all processes:", float(total))


# %%
def loss(w, x):
    return jnp.mean((x @ w - 1.0) ** 2)


@jax.jit
def step(w, x):
    return w - 0.1 * jax.grad(loss)(w, x)


w = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, P()))
for _ in range(50):
    w = step(w, batch)
gathered = multihost_utils.process_allgather(np.asarray(w))
print(
    "weights agree:",
    gathered.shape == (jax.process_count(), 4) and bool((gathered == gathered[0]).all()),
)
