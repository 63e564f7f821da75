// tikvsim serves TiDB's unistore as TiKV, with a placement driver in front of it, for our tests.
//
// Real Percolator transactions in memory, two stores on loopback ports, faults at will. It prints
// one line, "PD-ADDRESS CONTROL-ADDRESS", when it serves, and ends with its standard input, so that
// it never outlives the test that started it. See control.go for what can be asked of it.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/pingcap/kvproto/pkg/metapb"
	"github.com/pingcap/kvproto/pkg/pdpb"
	"github.com/pingcap/kvproto/pkg/tikvpb"
	"github.com/pingcap/log"
	"github.com/pingcap/tidb/pkg/store/mockstore/unistore/config"
	"github.com/pingcap/tidb/pkg/store/mockstore/unistore/server"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

const (
	clusterID   = 1
	stores      = 2
	messageSize = 64 << 20 // scans of a test may answer more than gRPC's 4 MiB
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "tikvsim:", err)
		os.Exit(1)
	}
}

func run() error {
	directory, err := os.MkdirTemp("", "tikvsim-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(directory)
	log.ReplaceGlobals(zap.NewNop(), &log.ZapProperties{})
	sim, err := newCluster(directory)
	if err != nil {
		return err
	}
	if err := sim.serve(); err != nil {
		return err
	}
	control, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	go http.Serve(control, sim.control())
	fmt.Println(sim.pdAddress, control.Addr())
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// newCluster begins with one region that all stores hold a peer of; the first store leads.
func newCluster(directory string) (*cluster, error) {
	conf := config.DefaultConf
	conf.Engine.DBPath = directory
	conf.Engine.ValueThreshold = 0
	conf.Engine.VolatileMode = true
	conf.Engine.SyncWrite = false
	conf.Engine.NumCompactors = 1
	conf.Engine.CompactL0WhenClose = false
	conf.Engine.VlogFileSize = 16 << 20
	conf.Server.Raft = false
	kv, regions, pd, err := server.NewMock(&conf, clusterID)
	if err != nil {
		return nil, err
	}
	sim := &cluster{kv: kv, regions: regions, pd: pd, leaders: map[uint64]uint64{}}
	sim.faults = newFaults()
	sim.locks = newLockRecords()
	region := &metapb.Region{Id: regions.AllocID(), RegionEpoch: &metapb.RegionEpoch{}}
	var all []*metapb.Store
	for range stores {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		store := &metapb.Store{Id: regions.AllocID(), Address: listener.Addr().String()}
		region.Peers = append(region.Peers, &metapb.Peer{Id: regions.AllocID(), StoreId: store.Id})
		sim.listeners = append(sim.listeners, listener)
		all = append(all, store)
	}
	return sim, regions.Bootstrap(all, region)
}

// serve starts one gRPC server for each store and one for the placement driver.
func (sim *cluster) serve() error {
	for _, listener := range sim.listeners {
		s := grpc.NewServer(
			grpc.UnaryInterceptor(sim.intercept),
			grpc.MaxRecvMsgSize(messageSize),
			grpc.MaxSendMsgSize(messageSize),
		)
		tikvpb.RegisterTikvServer(s, sim.kv)
		go s.Serve(listener)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	sim.pdAddress = listener.Addr().String()
	s := grpc.NewServer(grpc.UnaryInterceptor(sim.intercept))
	pdpb.RegisterPDServer(s, &placement{sim: sim})
	go s.Serve(listener)
	return nil
}
