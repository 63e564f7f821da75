package main

import (
	"context"
	"net"
	"sync"

	"github.com/pingcap/kvproto/pkg/metapb"
	"github.com/pingcap/kvproto/pkg/pdpb"
	"github.com/pingcap/tidb/pkg/store/mockstore/unistore/tikv"
)

// cluster is the state that stores, placement driver and control share.
type cluster struct {
	kv        *tikv.Server
	regions   *tikv.MockRegionManager
	pd        *tikv.MockPD
	listeners []net.Listener
	pdAddress string
	faults    *faults
	locks     lockRecords

	mu      sync.Mutex
	leaders map[uint64]uint64 // region -> store that leads it, where it is not the first; by mu
}

// leader is the peer that answers for a region now.
func (sim *cluster) leader(region *metapb.Region) *metapb.Peer {
	sim.mu.Lock()
	store, moved := sim.leaders[region.Id]
	sim.mu.Unlock()
	for _, peer := range region.Peers {
		if moved && peer.StoreId == store {
			return peer
		}
	}
	return region.Peers[0]
}

// placement is what clients use of PD.
type placement struct {
	pdpb.UnimplementedPDServer
	sim *cluster
}

func header() *pdpb.ResponseHeader {
	return &pdpb.ResponseHeader{ClusterId: clusterID}
}

func (p *placement) GetMembers(
	context.Context, *pdpb.GetMembersRequest,
) (*pdpb.GetMembersResponse, error) {
	urls := []string{"http://" + p.sim.pdAddress}
	member := &pdpb.Member{Name: "pd", MemberId: 1, PeerUrls: urls, ClientUrls: urls}
	members := []*pdpb.Member{member}
	return &pdpb.GetMembersResponse{
		Header: header(), Members: members, Leader: member, EtcdLeader: member,
	}, nil
}

// Tso hands out timestamps; a fault on "Tso" delays or freezes each answer.
func (p *placement) Tso(stream pdpb.PD_TsoServer) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := p.sim.faults.before(stream.Context(), "Tso"); err != nil {
			return err
		}
		var physical, logical int64
		for range max(request.Count, 1) {
			if physical, logical, err = p.sim.pd.GetTS(stream.Context()); err != nil {
				return err
			}
		}
		err = stream.Send(&pdpb.TsoResponse{
			Header:    header(),
			Count:     request.Count,
			Timestamp: &pdpb.Timestamp{Physical: physical, Logical: logical},
		})
		if err != nil {
			return err
		}
	}
}

func (p *placement) answer(region *metapb.Region) *pdpb.GetRegionResponse {
	if region == nil {
		return &pdpb.GetRegionResponse{Header: header()}
	}
	return &pdpb.GetRegionResponse{
		Header: header(), Region: region, Leader: p.sim.leader(region),
	}
}

func (p *placement) GetRegion(
	_ context.Context, request *pdpb.GetRegionRequest,
) (*pdpb.GetRegionResponse, error) {
	region, _, _, _ := p.sim.regions.GetRegionByKey(request.RegionKey)
	return p.answer(region), nil
}

func (p *placement) GetRegionByID(
	_ context.Context, request *pdpb.GetRegionByIDRequest,
) (*pdpb.GetRegionResponse, error) {
	return p.answer(p.sim.regions.GetRegion(request.RegionId)), nil
}

func (p *placement) GetStore(
	_ context.Context, request *pdpb.GetStoreRequest,
) (*pdpb.GetStoreResponse, error) {
	for _, store := range p.sim.regions.GetAllStores() {
		if store.Id == request.StoreId {
			return &pdpb.GetStoreResponse{Header: header(), Store: store}, nil
		}
	}
	return &pdpb.GetStoreResponse{Header: header()}, nil
}

func (p *placement) GetAllStores(
	context.Context, *pdpb.GetAllStoresRequest,
) (*pdpb.GetAllStoresResponse, error) {
	return &pdpb.GetAllStoresResponse{
		Header: header(), Stores: p.sim.regions.GetAllStores(),
	}, nil
}

func (p *placement) UpdateGCSafePoint(
	_ context.Context, request *pdpb.UpdateGCSafePointRequest,
) (*pdpb.UpdateGCSafePointResponse, error) {
	return &pdpb.UpdateGCSafePointResponse{
		Header: header(), NewSafePoint: request.SafePoint,
	}, nil
}
