-- One commit of fsmeta/store.py, atomically. See apply.py for the meaning of each step.
-- KEYS: the rows this client wants to be told about; ARGV[1]: msgpack of the commit.
-- Everything is validated before the first write, since Redis does not undo a failed script. Only
-- counters are moved early, for Redis alone can add 64-bit numbers; `refuse` moves them back, and
-- one that is 0 then may as well be absent.
-- No number above 2^53 may pass through Lua: counters are compared as decimal strings, and
-- sequences as two words, for `<` of strings follows the server's locale.
-- Returns 0 applied, 1 conflict, 2 fenced, 3 not empty, or the tag of the limit exceeded.
local call, pcall, sub = redis.call, redis.pcall, string.sub
local fence, worker, sequence, checks, empties, writes = unpack(cmsgpack.unpack(ARGV[1]))

local function above(value, limit)
  if sub(value, 1, 1) == '-' then return false end
  return #value > #limit or (#value == #limit and value > limit)
end

-- whether `sequence` or a later one has been applied
local function is_repeat(last)
  if not last then return false end
  local seen_high, seen_low = struct.unpack('>I4I4', last)
  local high, low = struct.unpack('>I4I4', sequence)
  return seen_high > high or (seen_high == high and seen_low >= low)
end

if fence then
  local state = call('HMGET', fence, 'a', worker)
  if not state[1] then return 2 end
  if #writes > 0 and is_repeat(state[2]) then return 0 end
end
for i = 1, #checks, 3 do
  if call('HGET', checks[i], checks[i + 1]) ~= checks[i + 2] then return 1 end
end
for i = 1, #empties do
  if call('EXISTS', empties[i]) == 1 then return 3 end
end

local added = {}

-- answer `reply` and leave every counter as it was
local function refuse(reply)
  for j = #added, 1, -1 do
    local write = added[j]
    if call('HINCRBY', write[2], write[3], write[7]) == 0 then call('HDEL', write[2], write[3]) end
  end
  return reply
end

local function corrupt(write, why)
  return redis.error_reply('CORRUPT ' .. why .. ' at row ' .. write[2] .. ' field ' .. write[3])
end

-- `record` with the parts of a MERGE changed; nil where they do not fit
local function merge(record, write)
  for j = 4, #write, 2 do
    local at, value = write[j], write[j + 1]
    if type(value) == 'number' then
      if at + 4 > #record then return nil end
      value = struct.unpack('>I4', record, at + 1) + value
      if value < 0 or value >= 4294967296 then return nil end
      value = struct.pack('>I4', value)
    elseif at + #value > #record then
      return nil
    end
    record = sub(record, 1, at) .. value .. sub(record, at + #value + 1)
  end
  return record
end

local merged = {}
for i = 1, #writes do
  local write = writes[i]
  if write[1] == 5 then
    local record = call('HGET', write[2], write[3])
    if not record then return refuse(1) end
    merged[i] = merge(record, write)
    if not merged[i] then return refuse(corrupt(write, 'record does not take a change')) end
  elseif write[1] == 3 then
    local moved = pcall('HINCRBY', write[2], write[3], write[4])
    if type(moved) == 'table' then return refuse(corrupt(write, 'counter can not be moved')) end
    added[#added + 1] = write
    if write[5] ~= '0' and sub(write[4], 1, 1) ~= '-'
        and above(call('HGET', write[2], write[3]), write[5]) then
      return refuse(write[6])
    end
  end
end

local paired = false
for i = 1, #writes do
  local write = writes[i]
  local op = write[1]
  if paired then
    paired = false -- this one went with the last
  elseif op == 0 then
    local after = writes[i + 1]
    paired = after and after[1] == 0 and after[2] == write[2]
    if paired then
      call('HSET', write[2], write[3], write[4], after[3], after[4])
    else
      call('HSET', write[2], write[3], write[4])
    end
  elseif op == 1 then
    call('HDEL', write[2], write[3])
  elseif op == 2 then
    call('UNLINK', write[2])
  elseif op == 4 then
    call('HSET', write[2], write[3], (call('HGET', write[2], write[3]) or '') .. write[4])
  elseif op == 5 then
    call('HSET', write[2], write[3], merged[i])
  end
end
if fence and #writes > 0 then call('HSET', fence, worker, sequence) end
-- A row that a client changes is no longer tracked for it, unless the script reads it once more.
-- Up to Redis 7.0 any read tracks all declared keys, from 7.2 on only what it names (redis #11770).
if KEYS[1] then
  if (redis.REDIS_VERSION_NUM or 0) >= 0x070200 then
    call('EXISTS', unpack(KEYS))
  else
    call('EXISTS', KEYS[1])
  end
end
return 0
