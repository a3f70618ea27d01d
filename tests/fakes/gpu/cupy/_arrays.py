"""FAKE cupy.ndarray: a numpy array that nobody else sees, worked on by queued work alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from cupy.cuda import _memory, _queue


class _Device:
    id = 0

    def __enter__(self):
        return self

    def __exit__(self, *details):
        return None


class ndarray:
    """What is used of cupy.ndarray; anything else fails, as a real one may."""

    __slots__ = ("_raw",)
    __array_priority__ = 100
    device = _Device()

    def __init__(self, shape, dtype=float, memptr=None):
        self._raw = _memory.over(shape, dtype, memptr)

    @classmethod
    def _of(cls, raw: np.ndarray) -> ndarray:
        made = cls.__new__(cls)
        made._raw = raw
        return made

    dtype = property(lambda self: self._raw.dtype)
    shape = property(lambda self: self._raw.shape)
    ndim = property(lambda self: self._raw.ndim)
    size = property(lambda self: self._raw.size)
    nbytes = property(lambda self: self._raw.nbytes)
    itemsize = property(lambda self: self._raw.itemsize)
    flags = property(lambda self: self._raw.flags)

    @property
    def data(self):
        return SimpleNamespace(ptr=self._raw.ctypes.data if self._raw.nbytes else 0, device_id=0)

    @property
    def T(self):
        return ndarray._of(self._raw.T)

    def __len__(self):
        return len(self._raw)

    def __getitem__(self, key):
        return ndarray._of(self._raw[key] if self.ndim else self._raw[key].view())

    def reshape(self, *shape):
        if not self.flags.c_contiguous:
            raise NotImplementedError("the fake reshapes contiguous arrays only")
        return ndarray._of(self._raw.reshape(*shape))

    def view(self, dtype):
        if not self.flags.c_contiguous:
            raise ValueError("the fake views contiguous arrays only")
        return ndarray._of(self._raw.view(dtype))

    def copy(self):
        _queue.counted["copy"] += 1
        out = ndarray._of(_memory.pooled(self.shape, self.dtype, 0))
        _queue.push(lambda: np.copyto(out._raw, self._raw))
        return out

    def astype(self, dtype):
        out = ndarray._of(np.empty(self.shape, dtype))
        _queue.push(lambda: np.copyto(out._raw, self._raw, casting="unsafe"))
        return out

    def get(self):
        _queue.finish()
        return self._raw.copy()

    def __reduce__(self):
        import cupy

        return cupy.array, (self.get(),)

    def __array__(self, *arguments, **options):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Use .get()")

    def __truediv__(self, other):
        return np.divide(self, other)

    def __mul__(self, other):
        return np.multiply(self, other)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if method != "__call__" or options:
            return NotImplemented
        raws = [each._raw if isinstance(each, ndarray) else _scalar(each) for each in inputs]
        if out is None:
            likes = [r.reshape(-1)[:0] if isinstance(r, np.ndarray) else r for r in raws]
            shape = np.broadcast_shapes(*(np.shape(r) for r in raws))
            made = ndarray._of(np.empty(shape, ufunc(*likes).dtype))
        else:
            (made,) = out
        target = made._raw
        _queue.push(lambda: ufunc(*raws, out=target))
        return made

    def __array_function__(self, function, types, arguments, options):
        import cupy

        _queue.counted[function.__name__] += 1
        if function is np.copyto:
            to, source = arguments
            if not isinstance(to, ndarray) or not isinstance(source, ndarray):
                raise TypeError("copyto needs two arrays on the GPU")
            _queue.push(lambda: np.copyto(to._raw, source._raw, **options))
            return None
        if function is np.concatenate:
            (arrays,) = arguments
            raws = [each._raw for each in arrays]
            out = options.get("out")
            if out is None:
                out = ndarray._of(np.empty(sum(map(len, raws)), raws[0].dtype))
            assert out.size == sum(raw.size for raw in raws), "Output array is the wrong shape"
            _queue.push(lambda: np.concatenate(raws, out=out._raw))
            return out
        if function in (np.empty_like, np.zeros_like):
            return getattr(cupy, function.__name__)(*arguments, **options)
        return NotImplemented

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream=None):
        return self

    def _as_cupy(self):
        return self


def _scalar(value):
    if isinstance(value, (int, float, complex, np.generic)):
        return value
    raise TypeError(f"Unsupported type {type(value)}: the fake takes its own arrays and numbers")
