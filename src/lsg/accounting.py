"""placeholder"""
class Accountant:
    def __init__(self,n): self.n=n; self.k=0
    def step(self, **k): self.k+=1
    def __len__(self): return self.k
    def mechanism(self): return self.n
    def get_epsilon(self, delta): return 0.0
def create_accountant(n): return Accountant(n)
def calibrate_noise(**k): return 1.0
