package main

import (
	"context"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/pingcap/kvproto/pkg/errorpb"
	"github.com/pingcap/kvproto/pkg/kvrpcpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fault is one thing that shall go wrong with requests of one method.
type fault struct {
	Method string // as in "KvCommit"; "Tso" for timestamps
	Kind   string // before, after, delay, late, busy, leader, freeze
	Skip   int    // requests that pass first
	Count  int    // requests it befalls; 0: all
	Millis int    // of delay and late
	healed chan struct{} // closed when it is cleared
}

// faults are those in force, and how often each method was called.
type faults struct {
	mu     sync.Mutex
	active []*fault       // by mu
	counts map[string]int // by mu
	healed chan struct{}  // closed by the next clear; by mu
}

func newFaults() *faults {
	return &faults{counts: map[string]int{}, healed: make(chan struct{})}
}

func (f *faults) add(one *fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active = append(f.active, one)
}

func (f *faults) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active = nil
	close(f.healed)
	f.healed = make(chan struct{})
}

// take counts a request and finds what shall befall it.
func (f *faults) take(method string) *fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[method]++
	for i, one := range f.active {
		if one.Method != method {
			continue
		}
		if one.Skip > 0 {
			one.Skip--
			continue
		}
		found := *one
		found.healed = f.healed
		if one.Count == 1 {
			f.active = slices.Delete(f.active, i, i+1)
		} else if one.Count > 1 {
			one.Count--
		}
		return &found
	}
	return nil
}

// freeze holds a request until the next clear, also where no others are held.
func (one *fault) freeze(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-one.healed:
		return nil
	}
}

var unavailable = status.Error(codes.Unavailable, "tikvsim: connection lost")

// before does what befalls a request of a stream.
func (f *faults) before(ctx context.Context, method string) error {
	one := f.take(method)
	if one == nil {
		return nil
	}
	switch one.Kind {
	case "delay":
		time.Sleep(time.Duration(one.Millis) * time.Millisecond)
	case "freeze":
		return one.freeze(ctx)
	default:
		return unavailable
	}
	return nil
}

// intercept serves one request with what befalls it.
func (sim *cluster) intercept(
	ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler,
) (any, error) {
	method := path.Base(info.FullMethod)
	if refused := sim.judge(method, request); refused != nil {
		return refused, nil
	}
	handler := next
	next = func(ctx context.Context, request any) (any, error) {
		return sim.locks.serve(ctx, request, handler)
	}
	one := sim.faults.take(method)
	if one == nil {
		return answered(next(ctx, request))
	}
	switch one.Kind {
	case "before":
		return nil, unavailable
	case "after": // applied, but the client never hears of it
		next(ctx, request)
		return nil, unavailable
	case "late": // the client has given up when it applies
		time.Sleep(time.Duration(one.Millis) * time.Millisecond)
		next(context.WithoutCancel(ctx), request)
		return nil, unavailable
	case "delay":
		time.Sleep(time.Duration(one.Millis) * time.Millisecond)
	case "freeze":
		if err := one.freeze(ctx); err != nil {
			return nil, err
		}
	case "busy":
		busy := &errorpb.Error{Message: "busy", ServerIsBusy: &errorpb.ServerIsBusy{Reason: "test"}}
		return withRegionError(method, busy), nil
	case "leader":
		lost := &errorpb.Error{Message: "not leader", NotLeader: &errorpb.NotLeader{}}
		return withRegionError(method, lost), nil
	}
	return answered(next(ctx, request))
}

// answered puts right what unistore leaves out: that a key is not there.
func answered(response any, err error) (any, error) {
	if got, ok := response.(*kvrpcpb.GetResponse); ok && got.Error == nil && got.RegionError == nil {
		got.NotFound = len(got.Value) == 0
	}
	return response, err
}

// judge refuses requests to a store that does not lead the region; nil where it does.
func (sim *cluster) judge(method string, request any) any {
	asked, ok := request.(interface{ GetContext() *kvrpcpb.Context })
	if !ok || asked.GetContext().GetPeer() == nil {
		return nil
	}
	id := asked.GetContext().RegionId
	sim.mu.Lock()
	store, moved := sim.leaders[id]
	sim.mu.Unlock()
	if !moved || store == asked.GetContext().Peer.StoreId {
		return nil
	}
	leader := sim.leader(sim.regions.GetRegion(id))
	return withRegionError(method, &errorpb.Error{
		Message: "not leader", NotLeader: &errorpb.NotLeader{RegionId: id, Leader: leader},
	})
}

// withRegionError is a method's answer that the region was asked in vain.
func withRegionError(method string, err *errorpb.Error) any {
	switch method {
	case "KvGet":
		return &kvrpcpb.GetResponse{RegionError: err}
	case "KvBatchGet":
		return &kvrpcpb.BatchGetResponse{RegionError: err}
	case "KvScan":
		return &kvrpcpb.ScanResponse{RegionError: err}
	case "KvPrewrite":
		return &kvrpcpb.PrewriteResponse{RegionError: err}
	case "KvCommit":
		return &kvrpcpb.CommitResponse{RegionError: err}
	case "KvBatchRollback":
		return &kvrpcpb.BatchRollbackResponse{RegionError: err}
	case "KvCleanup":
		return &kvrpcpb.CleanupResponse{RegionError: err}
	case "KvResolveLock":
		return &kvrpcpb.ResolveLockResponse{RegionError: err}
	case "KvCheckTxnStatus":
		return &kvrpcpb.CheckTxnStatusResponse{RegionError: err}
	}
	panic("no region error for " + method)
}
