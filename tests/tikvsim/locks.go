package main

import (
	"context"
	"sync"

	"github.com/pingcap/kvproto/pkg/kvrpcpb"
	"google.golang.org/grpc"
)

// lockRecords adds what unistore leaves out: that a key which a transaction has only locked, in
// TiKV, conflicts with any transaction that began before that one committed. Without it, a client
// that relies on such locks would look as if it let two transactions skew each other's reads.
type lockRecords struct {
	mu        sync.Mutex          // held while a prewrite or commit is served
	prewrites map[uint64][]string // locked keys by the transaction's start
	committed map[string]uint64   // key -> when one was last committed
}

func newLockRecords() lockRecords {
	return lockRecords{prewrites: map[uint64][]string{}, committed: map[string]uint64{}}
}

// serve answers a request, and refuses or notes what it has to do with locks.
func (l *lockRecords) serve(ctx context.Context, request any, next grpc.UnaryHandler) (any, error) {
	switch asked := request.(type) {
	case *kvrpcpb.PrewriteRequest:
		l.mu.Lock()
		defer l.mu.Unlock()
		if conflict := l.conflict(asked); conflict != nil {
			return &kvrpcpb.PrewriteResponse{Errors: []*kvrpcpb.KeyError{conflict}}, nil
		}
		response, err := next(ctx, request)
		l.prewritten(asked)
		return response, err
	case *kvrpcpb.CommitRequest:
		l.mu.Lock()
		defer l.mu.Unlock()
		response, err := next(ctx, request)
		if done, ok := response.(*kvrpcpb.CommitResponse); ok && done.Error == nil && err == nil {
			l.commit(asked.StartVersion, asked.CommitVersion)
		}
		return response, err
	case *kvrpcpb.ResolveLockRequest:
		l.mu.Lock()
		defer l.mu.Unlock()
		if asked.CommitVersion > 0 {
			l.commit(asked.StartVersion, asked.CommitVersion)
		}
		for _, one := range asked.TxnInfos {
			if one.Status > 0 {
				l.commit(one.Txn, one.Status)
			}
		}
	}
	return next(ctx, request)
}

// conflict is the answer to a prewrite of a key whose lock was committed after it began.
func (l *lockRecords) conflict(asked *kvrpcpb.PrewriteRequest) *kvrpcpb.KeyError {
	for _, mutation := range asked.Mutations {
		if at := l.committed[string(mutation.Key)]; at > asked.StartVersion {
			return &kvrpcpb.KeyError{Conflict: &kvrpcpb.WriteConflict{
				StartTs: asked.StartVersion, ConflictCommitTs: at, Key: mutation.Key,
			}}
		}
	}
	return nil
}

func (l *lockRecords) prewritten(asked *kvrpcpb.PrewriteRequest) {
	for _, mutation := range asked.Mutations {
		if mutation.Op == kvrpcpb.Op_Lock {
			start := asked.StartVersion
			l.prewrites[start] = append(l.prewrites[start], string(mutation.Key))
		}
	}
}

// commit notes that a transaction is committed with all its locks.
func (l *lockRecords) commit(start, at uint64) {
	for _, key := range l.prewrites[start] {
		l.committed[key] = max(l.committed[key], at)
	}
	delete(l.prewrites, start)
}
