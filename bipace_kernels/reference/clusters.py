import torch, numpy as np
def scan_rows(fingerprint, order, *, num_threads=1):
    x=fingerprint[order].double(); s=torch.zeros(order.numel(),dtype=torch.uint8)
    s[(x==0).all(1)]=2; s[~torch.isfinite(x).all(1)]=1
    return s
def cluster_cosine(fingerprint, order, group_offsets, usable, epsilon, *, num_threads=1):
    x=fingerprint[order].double().numpy(); off=group_offsets.tolist(); out=[]; nxt=0
    for b,e in zip(off[:-1],off[1:]):
        cents=[];ids=[];m=[]
        for i in range(b,e):
            if usable is not None and not usable[i]: out.append(nxt); nxt+=1; continue
            if epsilon==0:
                key=(x[i]+0.0).tobytes()
                if key in cents: out.append(ids[cents.index(key)])
                else: cents.append(key); ids.append(nxt); out.append(nxt); nxt+=1
                continue
            u=x[i]/np.abs(x[i]).max(); u=u/np.linalg.norm(u)
            if cents:
                s=np.array(cents)@u; best=s.max()
            if not cents or best<1-epsilon-1e-5:
                cents.append(u); ids.append(nxt); m.append(1); out.append(nxt); nxt+=1
            else:
                k=int(np.flatnonzero(s>=best-1e-5)[0]); m[k]+=1
                c=cents[k]+(u-cents[k])/m[k]; nn=np.linalg.norm(c)
                if nn>=1e-3: cents[k]=c/nn
                out.append(ids[k])
    return torch.tensor(out,dtype=torch.int64)
