import numpy as np, torch
def number_objects(values):
    if isinstance(values, torch.Tensor): return values.to(torch.int64)
    d={}; return torch.tensor([d.setdefault(v,len(d)) for v in values],dtype=torch.int64)
def ids_to_int(values,name):
    if isinstance(values,torch.Tensor): return values.to(torch.int64),True
    if isinstance(values,np.ndarray) and values.dtype.kind in "iu": return torch.from_numpy(values.astype(np.int64)),True
    if all(type(v) is int for v in values): return torch.tensor(list(values),dtype=torch.int64),True
    return number_objects(values),False
